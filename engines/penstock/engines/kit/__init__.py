"""What runners share: the frame of a step, the table of live requests, sampling, sizes, settings."""
