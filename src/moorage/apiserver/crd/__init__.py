"""Custom resources: definitions, structural schemas, CEL rules."""
