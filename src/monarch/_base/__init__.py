"""Names every layer uses: errors and identities."""
