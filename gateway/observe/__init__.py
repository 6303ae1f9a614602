"""Publishers of the gateway's counters: metrics, and the loads that the page and GetLoads show."""
