"""What trades seconds for bytes on one rank."""
