"""Random prompts of a known length. Used by the load generators in `bench/`.

Each word below is one token in SmolLM2's vocabulary, at the start of a text and after a space, and a common word in any
other byte-pair vocabulary of English; so N words are N tokens, give or take a start token. Reports show the number of
tokens that the server itself counted.
"""

from random import Random

WORDS = tuple(
    """
    ability action activity age air amount analysis animal answer area arm art article artist attention baby bank bed
    behavior benefit bill board body book box brother building business call car care case cell center change character
    choice church city class college color community company computer condition control cost country court culture
    cup data daughter day deal decision degree design development difference director doctor dog door east education
    effect election energy event evidence example experience eye face fact factor family father field figure film fire
    floor food foot force form friend future game girl glass goal ground group growth guide hair hand head health
    heart history home hospital hour house idea image individual industry information interest issue job kind knowledge
    land language law leader letter level life light line list lot love machine market material matter measure message
    method mind minute model moment money month mother movement movie music name nation nature network night note number
    office oil operation order page paper parent part party patient people performance period person phone picture piece
    place plan plant player point policy population position power practice president pressure price problem process
    product program project property purpose quality question race rate reason record region report research resource
    response rest result road role room rule scene school science sea season section series service side sign site size
    skill song sort sound source south space speech staff stage star state station step store story street student
    study style subject summer support surface system table task teacher team technology test theory thing thought time
    town trade training travel treatment tree trial type unit value version view voice wall water way week west window
    winter woman wood word work worker world year
    """.split()  # noqa: SIM905
)


def random_prompt(rng: Random, num_words: int) -> str:
    """`num_words` words drawn with replacement. Long prompts hardly ever begin alike, so no prefix cache helps."""
    return " ".join(rng.choices(WORDS, k=num_words))
