"""One handler for each kind of request: objects, pods, reviews, the node proxy."""
