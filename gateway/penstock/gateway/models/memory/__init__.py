"""The memory that models take, and the budget that they share."""
