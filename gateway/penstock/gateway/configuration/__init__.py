"""The configuration tree, and the ways to fill it: flags, variables, a file."""
