"""The attach/detach controller: volumes are attached to the nodes whose pods need them, and to no others."""
