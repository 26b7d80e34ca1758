"""HTTP: listening, connections, and the path of one request."""
