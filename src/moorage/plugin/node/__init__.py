"""What the plugin does on a node: stage, publish, expand, observe, recover."""
