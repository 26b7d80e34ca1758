"""Content negotiation and the protobuf encoding."""
