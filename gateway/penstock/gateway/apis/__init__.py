"""The APIs that clients speak: routes, schemas, and what is particular to each."""
