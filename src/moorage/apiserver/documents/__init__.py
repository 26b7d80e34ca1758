"""Documents that describe the server: discovery, OpenAPI, health and version endpoints."""
