"""What is computed: contracts, masks, and the problems that they make."""
