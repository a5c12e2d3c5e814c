"""What builds the environment, prepares the models, serves them and measures the plugin: nothing here is installed."""
