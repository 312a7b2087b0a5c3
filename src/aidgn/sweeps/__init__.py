"""Many runs: planned, launched, continued."""
