"""The table of docs/architectures.md: which engine serves which architecture."""
