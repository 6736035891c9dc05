"""The messages and interfaces between scheduler, runners, engine client and gateway. Imports none of them."""
