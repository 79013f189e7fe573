"""Words everyone shares: requests below the gateway, step outputs, errors, time, hashes, randomness."""
