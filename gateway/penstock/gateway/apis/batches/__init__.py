"""Files that clients upload, and batches: requests in a file, answered in the background, into another file."""
