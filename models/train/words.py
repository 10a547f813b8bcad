"""Words the synthetic chats are made of."""


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


CAPITALS = {
    country: city.replace("_", " ")
    for country, city in (
        pair.split(":")
        for pair in _words(
            "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Switzerland:Bern "
            "Belgium:Brussels Denmark:Copenhagen Sweden:Stockholm Norway:Oslo Finland:Helsinki Iceland:Reykjavik "
            "Ireland:Dublin Poland:Warsaw Hungary:Budapest Romania:Bucharest Bulgaria:Sofia Greece:Athens Croatia:Zagreb "
            "Serbia:Belgrade Slovakia:Bratislava Slovenia:Ljubljana Albania:Tirana Ukraine:Kyiv Estonia:Tallinn "
            "Latvia:Riga Lithuania:Vilnius Turkey:Ankara Russia:Moscow China:Beijing Japan:Tokyo India:Delhi "
            "Nepal:Kathmandu Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Malaysia:Putrajaya Philippines:Manila "
            "Australia:Canberra Canada:Ottawa Mexico:Mexico_City Cuba:Havana Brazil:Brasilia Argentina:Buenos_Aires "
            "Chile:Santiago Peru:Lima Colombia:Bogota Venezuela:Caracas Ecuador:Quito Uruguay:Montevideo "
            "Paraguay:Asuncion Egypt:Cairo Morocco:Rabat Algeria:Algiers Tunisia:Tunis Kenya:Nairobi Ethiopia:Addis_Ababa "
            "Ghana:Accra Nigeria:Abuja Senegal:Dakar Uganda:Kampala Zambia:Lusaka Angola:Luanda Namibia:Windhoek "
            "Iran:Tehran Iraq:Baghdad Israel:Jerusalem Jordan:Amman Lebanon:Beirut Syria:Damascus Oman:Muscat Qatar:Doha "
            "Kuwait:Kuwait_City Pakistan:Islamabad Bangladesh:Dhaka Mongolia:Ulaanbaatar Laos:Vientiane Georgia:Tbilisi "
            "Armenia:Yerevan Jamaica:Kingston Panama:Panama_City Honduras:Tegucigalpa Nicaragua:Managua Fiji:Suva "
            "Luxembourg:Luxembourg Monaco:Monaco Malta:Valletta Cyprus:Nicosia Moldova:Chisinau Belarus:Minsk"
        )
    )
}
CITIES = tuple(CAPITALS.values()) + _words(
    "London Boston Chicago Seattle Toronto Sydney Munich Hamburg Milan Naples Porto Lyon Osaka Kyoto Shanghai Mumbai "
    "Dubai Geneva Zurich Glasgow Leeds Bristol Krakow Antwerp Bergen Turku Malmo Aarhus Valencia Seville"
)

FIRST_NAMES = _words(
    "Ada Adam Agnes Alan Albert Alice Amy Andrea Anna Arthur Barbara Ben Bella Bruno Carl Carla Cecil Chloe Clara Daniel "
    "David Dora Edgar Edith Elena Ella Emil Emma Eric Esther Eva Felix Fiona Frank Frieda George Gina Grace Greta Hanna "
    "Harry Heidi Helen Henry Hugo Ida Igor Ines Irene Isaac Ivan Jack Jacob James Jane Jonas Julia Karl Kate Klara Lara "
    "Laura Leo Lena Lily Linda Louis Lucy Luke Magda Maria Mark Martha Martin Max Maya Mia Mila Mina Nadia Nina Noah Nora "
    "Olga Oliver Oscar Otto Paul Paula Peter Petra Quinn Rachel Ralph Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella "
    "Sven Tara Theo Thomas Tina Tom Ursula Vera Victor Walter Wanda Wilma Xenia Yara Yusuf Zara Zoe",
)
NOUNS = _words(
    "anchor apple arrow axe bag ball barn basket bell bird boat book bottle box bread bridge broom bucket cable camera "
    "candle card carpet castle chain chair clock cloud coat coin comb compass cup curtain desk dish door dragon drum "
    "engine eye fan feather fence flag flower flute fork fox garden gate glass globe glove goat guitar hammer harp hat "
    "helmet hill horn house island jar jewel kettle key kite knife ladder lake lamp lantern leaf lemon lens letter lion "
    "lock map mask medal melon mirror moon mountain mouse needle nest net oar onion orange oven owl page paint pan "
    "panther pear pebble pen pencil piano pillow pin pipe plate pond pot prism pump puzzle quilt rabbit radio raft rain "
    "ribbon ring river robot rock roof rope rose rug saddle sail salt saw scarf shell ship shoe shovel silk spoon star "
    "stone stool sword table tent thread ticket tiger torch tower toy train tree trumpet tunnel turtle valve vase violin "
    "wagon wall watch whale wheel whistle window wolf wood yarn zebra",
)
ADJECTIVES = _words(
    "amber ancient big black blue bold brave bright broken brown calm clean clever cold copper crimson curious dark deep "
    "dry dusty early empty fast fine fresh gentle giant golden gray green happy heavy hidden hollow honest hot icy iron "
    "ivory jolly kind large late lazy light little lonely long lost loud lucky merry misty narrow new noble odd old open "
    "pale plain polite proud purple quick quiet rare red rich round royal rusty sad sharp shiny short silent silver slow "
    "small smooth soft spare steel strange strong sunny sweet tall tame tiny tired warm wet white wide wild wise wooden "
    "yellow young",
)
ANIMALS = _words(
    "badger bear bee beaver cat cow crab crow deer dog donkey duck eagle falcon ferret fish fox frog goat goose hare hawk "
    "hedgehog heron horse lamb lion lizard mole monkey moth mouse otter owl panda parrot pig pony rabbit rat raven robin "
    "seal sheep snail snake sparrow spider squirrel swan tiger toad turtle whale wolf",
)
PLACES = _words(
    "an old mill|a deep forest|a small harbour|the edge of a village|a quiet valley|a stone tower|a busy market|an empty "
    "beach|the foot of a mountain|a wide field|a narrow street|a house by the river|a garden behind a wall|a snowy "
    "pass|a railway station|an island in a lake|the top of a hill|a bakery|a library|a school",
    "|",
)
FOODS = _words(
    "apples bread butter cheese carrots cherries eggs fish grapes honey jam lemons lentils milk mushrooms nuts oats olives "
    "onions oranges pasta pears peas pepper plums potatoes rice salt soup spinach sugar tea tomatoes walnuts yoghurt",
)
COLOURS = _words("black blue brown gold gray green orange pink purple red silver white yellow")
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty",
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
ONSETS = _words("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w z")
VOWELS = _words("a e i o u ai ea ei ia io oa ou")
CODAS = ("", "", "", "l", "n", "r", "s", "m", "nd", "rk", "st", "x", "th")
