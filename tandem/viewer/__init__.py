"""The local web page for run folders: its server, the data it reads, and the page itself in `static`."""
