"""The part that every protocol's front shares: who asks, what may be asked where, the drain. No protocol in here."""
