"""What runners share: the table of live requests, sampling, settings."""
