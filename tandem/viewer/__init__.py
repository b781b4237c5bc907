"""The local web page for run folders: its server, its data, and the page's files in `static`."""
