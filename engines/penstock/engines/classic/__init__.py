"""Where the contract of backends was before 0.2: plugins written for it import it from here."""
