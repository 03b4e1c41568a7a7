"""Workers train alone and average their changes. `local` is the configuration, `rounds` what happens."""
