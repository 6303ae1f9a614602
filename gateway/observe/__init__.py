"""Publishers of what the gateway counts: metrics, and the loads that the page and GetLoads show."""
