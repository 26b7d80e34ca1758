"""One parsed request: route, query options, call."""
