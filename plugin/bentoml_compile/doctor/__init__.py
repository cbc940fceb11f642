"""What may keep this machine from compiling, storing, sharing and telling: checks that neither hang nor raise."""
