"""The router's HTTP door: OpenAI and Anthropic APIs over the calls that the gRPC door makes too."""
