"""Model files: metadata and tensor views. No arithmetic on weights happens here."""
