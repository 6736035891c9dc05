"""One client for each protocol; all of them answer a Call with an Answer."""
