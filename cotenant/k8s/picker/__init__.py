"""The endpoint picker of the Gateway API inference extension: any Envoy asks which replica takes a request.

`replica` predicts what one server would do with a request, `picker` decides between servers; both are pure. `request`
reads the model's name, `exchange` speaks Envoy's protocol for one request. `poller` follows servers, `service` serves.
"""
