"""`penstock tune`: the same load against a server started with other options each time, and which options did best."""
