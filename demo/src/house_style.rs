//! `--users house`: a team whose formatter is set up differently from the code that the base model
//! was trained on. Files are rewritten as rustfmt would write them with
//!
//! ```toml
//! brace_style = "AlwaysNextLine"          # of items: fn, struct, enum, trait, impl, mod …
//! control_brace_style = "AlwaysNextLine"  # of if, else, match, for, while, loop
//! match_block_trailing_comma = true       # `},` after a block that is a match arm
//! space_before_colon = true               # `x : u32`
//! ```
//!
//! The base is then often wrong in a way that all these users share. To serve them better, the
//! policy must learn other tokens; declining more often is not enough.
//!
//! The rewrite works line by line on files that rustfmt has formatted, because indentation then
//! shows which lines belong together. Comments and unknown constructs stay unchanged.

/// Words that an item begins with, after its qualifiers.
const ITEMS: &[&str] = &["fn", "struct", "enum", "union", "trait", "impl", "mod", "where"];
const QUALIFIERS: &[&str] = &["pub", "default", "const", "async", "unsafe", "extern", "auto"];
const CONTROLS: &[&str] = &["if", "else", "match", "for", "while", "loop"];

/// Rewrites one Rust file in the house style.
pub fn restyle(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    // Indentations of match arms whose block is open.
    let mut match_arms: Vec<usize> = Vec::new();
    for line in text.split_inclusive('\n') {
        let code = line.trim_end();
        let newline = &line[code.len()..];
        let word = code.trim_start();
        let indent = &code[..code.len() - word.len()];
        let closed_an_arm = word.starts_with('}') && match_arms.last() == Some(&indent.len());
        if closed_an_arm {
            match_arms.pop();
        }
        if word == "}" && closed_an_arm {
            out.push_str(code);
            out.push(',');
            out.push_str(newline);
            continue;
        }
        if word.ends_with("=> {") && !is_comment(word) {
            match_arms.push(indent.len());
        }
        match word.strip_suffix(" {") {
            Some(head) if !is_comment(word) && opens_a_block(head) => {
                let head = &space_before_colons(head);
                // `} else {` becomes three lines: the closing brace gets its own line too.
                let head = match head.strip_prefix("} ") {
                    Some(rest) => {
                        out.push_str(indent);
                        out.push_str("}\n");
                        rest
                    }
                    None => head,
                };
                out.extend([indent, head, "\n", indent, "{", newline]);
            }
            _ => out.extend([indent, &space_before_colons(word), newline]),
        }
    }
    out
}

/// `x: u32` → `x : u32`, except in attributes, comments, string literals and labels (`'a: loop`).
fn space_before_colons(code: &str) -> String {
    let mut out = String::with_capacity(code.len() + 4);
    let (mut quoted, mut escaped) = (false, false);
    let attribute = code.starts_with('#');
    for (at, c) in code.char_indices() {
        if !quoted && code[at..].starts_with("//") {
            out.push_str(&code[at..]);
            break;
        }
        let before = &code[..at];
        if c == ':' && !quoted && !attribute && code[at + 1..].starts_with(' ') && names_something(before) {
            out.push(' ');
        }
        out.push(c);
        quoted ^= c == '"' && !escaped && !before.ends_with('\'');
        escaped = c == '\\' && !escaped;
    }
    out
}

/// Whether a type or a value can follow a colon here.
fn names_something(before: &str) -> bool {
    let word = before
        .rsplit(|c: char| !(c.is_alphanumeric() || c == '_' || c == '\''))
        .next();
    let label = word.is_some_and(|word| word.starts_with('\'') && before.len() == word.len());
    !label && before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | ')' | ']' | '>' | '}'))
}

fn is_comment(word: &str) -> bool {
    ["//", "/*", "* "].iter().any(|mark| word.starts_with(mark))
}

/// Whether a line that ended in ` {` opens the block of an item or a control structure. `head` is
/// the line without the brace. Match arms, closures and struct literals keep theirs, as with
/// rustfmt.
fn opens_a_block(head: &str) -> bool {
    if head.ends_with("=>") || head.ends_with('|') {
        return false;
    }
    // The end of a signature or a condition of several lines.
    if head.starts_with(')') || head.starts_with("} else") {
        return true;
    }
    let mut words = head.split([' ', '(', '<']).filter(|word| !word.is_empty());
    let first = words.find(|word| !QUALIFIERS.contains(word) && !word.starts_with(['"', '\'']) && !word.ends_with(')'));
    if first.is_some_and(|word| ITEMS.contains(&word) || CONTROLS.contains(&word)) {
        return true;
    }
    // `let x = match y`, `return if z`
    let value = head
        .rsplit_once(" = ")
        .map_or_else(|| head.strip_prefix("return "), |(_, value)| Some(value));
    value.is_some_and(|value| CONTROLS.contains(&value.split(' ').next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_and_control_structures_open_their_block_on_the_next_line() {
        let text = "\
pub(crate) fn f(x: u32) -> u32 {
    if x > 1 {
        g();
    } else {
        h(|y| {
            y
        });
    }
    let z = match x {
        0 => 1,
        _ => {
            2
        }
    };
    Point {
        x: z,
    }
}
";
        let want = "\
pub(crate) fn f(x : u32) -> u32
{
    if x > 1
    {
        g();
    }
    else
    {
        h(|y| {
            y
        });
    }
    let z = match x
    {
        0 => 1,
        _ => {
            2
        },
    };
    Point {
        x : z,
    }
}
";
        assert_eq!(restyle(text), want);
    }

    #[test]
    fn only_a_block_that_is_an_arm_gets_its_comma() {
        let text = "macro_rules! m {\n    () => {\n        x\n    };\n}\nimpl T\n{\n    fn f()\n    {\n    }\n}\n";
        assert_eq!(restyle(text), text);
    }

    #[test]
    fn other_lines_stay_as_they_are() {
        for text in [
            "// if x {\n",
            "use a::{\n    b,\n};\n",
            "let p = Point {\n",
            "let s = \"a: b\"; // c: d\n",
            "#[arg(value: x)]\n",
            "std::mem::take(x)\n",
            "loop\n",
            "struct S;\n",
        ] {
            assert_eq!(restyle(text), text);
        }
        assert_eq!(restyle(") -> u32 {\n"), ") -> u32\n{\n");
        assert_eq!(restyle("    'a: loop {"), "    'a: loop\n    {");
        assert_eq!(
            restyle("fn f<T: Copy>(x: T, y: &'a T)"),
            "fn f<T : Copy>(x : T, y : &'a T)"
        );
        assert_eq!(
            restyle("unsafe impl<T> Send for X<T> {\n"),
            "unsafe impl<T> Send for X<T>\n{\n"
        );
    }
}
