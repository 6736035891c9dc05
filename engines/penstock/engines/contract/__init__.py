"""What scheduler, runners, engine client and gateway say to each other. Imports none of them."""
