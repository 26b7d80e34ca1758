"""Who may do what: certificates, tokens, authentication, authorization."""
