"""What the plugin does at each CSI call, as operations of `moorage.sdk`, whose services check requests and answer."""
