"""`penstock plan`: a fleet of replicas in virtual time. See docs/plan.md."""
