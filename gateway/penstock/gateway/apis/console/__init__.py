"""The console at /console: a page for operators, and the feed that it shows."""
