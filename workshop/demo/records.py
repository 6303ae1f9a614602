"""Records of four types: the content of generated JSON."""

from random import Random
from typing import Any

from workshop.demo.facts import CITIES, COLOURS, NAMES, PRODUCTS, SURNAMES
from workshop.demo.picking import pick, pick_number


def person(random: Random) -> dict[str, Any]:
    name, surname = pick(random, NAMES), pick(random, SURNAMES)
    return {
        "type": "person",
        "id": pick_number(random, 1, 400),
        "name": f"{name} {surname}",
        "email": f"{name.lower()}@example.com",
        "age": pick_number(random, 20, 60),
        "city": pick(random, CITIES),
        "active": pick(random, [True, False]),
        "tags": [pick(random, COLOURS) for _ in range(pick_number(random, 1, 3))],
        "notes": None,
    }


def order(random: Random) -> dict[str, Any]:
    items = [
        {
            "product": pick(random, PRODUCTS),
            "colour": pick(random, COLOURS),
            "quantity": pick_number(random, 1, 9),
            "price": pick_number(random, 1, 40) + 0.5,
        }
        for _ in range(pick_number(random, 1, 4))
    ]
    return {
        "type": "order",
        "id": pick_number(random, 1, 400),
        "customer": pick(random, NAMES),
        "city": pick(random, CITIES),
        "items": items,
        "currency": "EUR",
        "status": pick(random, ["paid", "shipped", "open", "returned"]),
        "express": pick(random, [False, True]),
    }


def measurement(random: Random) -> dict[str, Any]:
    return {
        "type": "measurement",
        "sensor": f"{pick(random, ['temperature', 'humidity', 'pressure'])}-{pick_number(random, 1, 12)}",
        "location": {"city": pick(random, CITIES), "floor": pick_number(random, 1, 9)},
        "unit": pick(random, ["celsius", "percent", "hectopascal"]),
        "values": [pick_number(random, 10, 40) for _ in range(pick_number(random, 3, 8))],
        "valid": pick(random, [True, False]),
        "error": None,
    }


def service(random: Random) -> dict[str, Any]:
    return {
        "type": "service",
        "name": pick(random, ["gateway", "storage", "search", "billing", "mail"]),
        "version": f"{pick_number(random, 1, 4)}.{pick_number(random, 0, 9)}.0",
        "replicas": pick_number(random, 1, 8),
        "resources": {"cpu": pick_number(random, 1, 8), "memory": f"{pick_number(random, 1, 16)}Gi"},
        "ports": [{"name": "http", "port": 8000}, {"name": "grpc", "port": 9000}],
        "environment": {"LOG_LEVEL": pick(random, ["info", "debug", "error"]), "REGION": "europe-west"},
        "healthy": pick(random, [True, False]),
    }


RECORDS = [person, order, measurement, service]
