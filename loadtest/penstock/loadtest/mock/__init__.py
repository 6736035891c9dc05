"""The reference server: answers at times that are given, and tells when it really did."""
