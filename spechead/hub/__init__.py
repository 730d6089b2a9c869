"""Heads on the Hub and on other servers: inspect, publish with a card, export to the formats that engines read."""
