"""Foursquare's venue types in the nine groups of the thesis' Tables 4.5 and 4.6, assigned after Foursquare's own tree.

The data names the fine type alone; where the tree of the time is not known for certain, the type went to the group that
holds its neighbours in today's.
"""

from __future__ import annotations

GROUPS = ("A&E", "C&U", "Food", "NS", "O&R", "P&OP", "Res.", "S&S", "T&T")

_NAMED: dict[str, str] = {
    "A&E": (
        "Historic Site|Monument / Landmark|Art Museum|Art Gallery|Multiplex|General Entertainment|"
        "Theater|Concert Hall|Music Venue|History Museum|Movie Theater|Museum|Performing Arts Venue|"
        "Racetrack|Opera House|Science Museum|Comedy Club|Jazz Club|Rock Club|Arcade|Public Art|"
        "Indie Movie Theater|Indie Theater|Bowling Alley|Theme Park|Casino|Zoo|Pool Hall|Dance Studio|"
        "Water Park|Arts & Entertainment|Planetarium|Piano Bar|Hockey Arena|Theme Park Ride / Attraction|"
        "Paintball Field|Aquarium"
    ),
    "C&U": (
        "University|General College & University|Student Center|Fraternity House|Sorority House|"
        "Community College|Medical School|Law School|Trade School"
    ),
    "Food": (
        "Café|Ice Cream Shop|Bakery|Coffee Shop|Pizza Place|Sandwich Place|Steakhouse|Dessert Shop|"
        "Burger Joint|Diner|Cupcake Shop|Breakfast Spot|Food Court|Gastropub|Food|Snack Place|Juice Bar|"
        "BBQ Joint|Salad Place|Bagel Shop|Tea Room|Food Truck|Deli / Bodega|Fried Chicken Joint|"
        "Ramen / Noodle House|Cafeteria|Soup Place|Donut Shop|Winery|Brewery|Mac & Cheese Joint|"
        "Hot Dog Joint|Taco Place|Wings Joint|Fish & Chips Shop|Burrito Place|Yogurt|Distillery"
    ),
    "NS": (
        "Cocktail Bar|Nightclub|Pub|Bar|Lounge|Wine Bar|Other Nightlife|Beer Garden|Gay Bar|Strip Club|"
        "Speakeasy|Sports Bar|Dive Bar|Whisky Bar|Nightlife Spot|Karaoke Bar|Hookah Bar|Sake Bar|"
        "Hotel Bar"
    ),
    "O&R": (
        "Plaza|City|Park|Other Great Outdoors|Neighborhood|Bridge|Scenic Lookout|Outdoors & Recreation|"
        "Playground|River|Garden|Castle|Island|Harbor / Marina|Sculpture Garden|Beach|Field|Lake|Dog Run|"
        "Golf Course|Cemetery|Campground|Farm|Athletic & Sport|Athletics & Sports|Skate Park|"
        "Skating Rink|Hiking Trail|Lighthouse|Stables|Mountain|Hot Spring|Well|Vineyard|Surf Spot|Track|"
        "Pier|Ski Lodge|Roof Deck|Pool|Gym|Gym / Fitness Center|Gym Pool|Yoga Studio|Martial Arts Dojo|"
        "Tennis|Tennis Court|Soccer Field|Basketball Court|Baseball Field|Volleyball Court"
    ),
    "P&OP": (
        "Office|Church|Event Space|Building|Hospital|Fair|Post Office|Government Building|"
        "Coworking Space|Convention Center|City Hall|Tech Startup|Medical Center|Parking|Doctor's Office|"
        "Library|School|Factory|Meeting Room|Courthouse|Design Studio|Professional & Other Places|"
        "Police Station|Dentist's Office|Spiritual Center|High School|Conference Room|Capitol Building|"
        "Emergency Room|Military Base|Radio Station|Auditorium|Embassy / Consulate|Elementary School|"
        "Non-Profit|Temple|Shrine|Laboratory|Middle School|Nursery School|Veterinarian|Animal Shelter|"
        "Music School|Voting Booth|Campaign Office|Synagogue|Fire Station|Mosque|Storage Facility|"
        "Recycling Facility|Daycare|Funeral Home"
    ),
    "Res.": (
        "Home (private)|Residential Building (Apartment / Condo)|Housing Development|Assisted Living|Boarding House"
    ),
    "T&T": (
        "Train Station|Hotel|Airport|Subway|Road|Platform|Gas Station / Garage|Bus Line|Bus Station|"
        "Bed & Breakfast|Light Rail|Train|Hostel|General Travel|Boat or Ferry|Rest Area|Airport Gate|"
        "Travel Lounge|Airport Terminal|Taxi|Resort|Airport Lounge|Moving Target|"
        "Tourist Information Center|Rental Car Location|Motel|Plane|Bike Rental / Bike Share|Hotel Pool|"
        "Ferry|Travel & Transport|Airport Tram|EV Charging Station"
    ),
}
_BY_NAME = {name: group for group, names in _NAMED.items() for name in names.split("|")}


def group_of(kind: str) -> str:
    """Return the group of a venue type; shops and services are all that is left over."""
    name = " ".join(kind.split())
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("College"):
        return "C&U"
    if name.endswith("Restaurant"):
        return "Food"
    if name.endswith("Stadium"):
        return "A&E"
    return "Food" if name.startswith("Caf") else "S&S"
