"""Tables, figures and the report page."""
