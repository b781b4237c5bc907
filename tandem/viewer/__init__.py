"""The local web page over run folders: its server, what it reads, and the page itself in `static`."""
