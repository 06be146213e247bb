"""The web page: hand-written files, which the server hands out as they are, and the headers that they are held to."""
