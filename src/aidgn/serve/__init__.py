"""A local page and a JSON endpoint for one model: drop pictures, see what the model makes of them."""
