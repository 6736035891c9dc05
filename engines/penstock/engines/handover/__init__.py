"""Keys and values that one engine computes and another one of the same machine goes on with, through shared memory."""
