"""The hardened HTTP server: limits, keys, drain, health. What requests and answers say is in `gateway/apis`."""
