"""The 32 sentences the demo embeds when it is given none: ordinary ones in pairs, and odd ones."""

from __future__ import annotations

ORDINARY = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "A man is playing a guitar on the street.",
    "Someone performs music with a string instrument outdoors.",
    "The central bank raised interest rates by half a percent.",
    "Borrowing became more expensive after the monetary authority's decision.",
    "How do I reset my password?",
    "I cannot log in to my account any more.",
    "Two dogs are running through the snow.",
    "A pair of huskies races across a white field.",
    "The recipe needs three eggs, flour and a little sugar.",
    "Mix the batter and bake the cake for forty minutes.",
    "Matrix multiplication dominates the cost of neural networks.",
    "Most of the time in deep learning is spent in linear algebra.",
    "She published her first novel at the age of sixty.",
    "The author was a pensioner when her debut book came out.",
    "Please send me the invoice by Friday.",
    "The train to Berlin leaves from platform nine at noon.",
    "Our flight was cancelled because of the storm.",
    "The patient was given antibiotics for a lung infection.",
    "Pneumonia is usually treated with penicillin.",
    "The telescope found water vapour on a distant planet.",
    "Astronomers detected an atmosphere around an exoplanet.",
    "The team lost the final on penalties.",
)

_LONG = (
    "Once there was a miller who left his three sons his mill, his donkey and his cat; the eldest"
    " took the mill, the second took the donkey, and the youngest got nothing but the cat. "
)

ODD = (
    "",
    (_LONG * 12).strip(),  # over the model's 256 tokens: it is cut
    "今天天气很好，我们去公园散步吧。",  # Chinese
    "الطقس جميل اليوم والسماء صافية.",  # Arabic
    "Сегодня прекрасная погода, пойдём гулять в парк.",  # Russian
    "आज मौसम बहुत अच्छा है।",  # Hindi
    "🌞🌳🚶🎉",
)

SENTENCES = ORDINARY + ODD
