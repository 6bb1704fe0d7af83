//! The rule `braces`. It works line by line on files that rustfmt has formatted, because
//! indentation then shows which lines belong together. Unknown constructs stay unchanged.

use super::scan::{Kind, Line, Scan};

/// Words that an item begins with, after its qualifiers.
const ITEMS: &[&str] = &["fn", "struct", "enum", "union", "trait", "impl", "mod", "where"];
const QUALIFIERS: &[&str] = &["pub", "default", "const", "async", "unsafe", "extern", "auto"];
const CONTROLS: &[&str] = &["if", "else", "match", "for", "while", "loop"];

/// Items and control structures open their block on the next line; a block that is a match arm is
/// followed by a comma. In rustfmt's words:
///
/// ```toml
/// brace_style = "AlwaysNextLine"          # of items: fn, struct, enum, trait, impl, mod …
/// control_brace_style = "AlwaysNextLine"  # of if, else, match, for, while, loop
/// match_block_trailing_comma = true       # `},` after a block that is a match arm
/// ```
pub fn braces(text: &str) -> String {
    let scan = Scan::new(text);
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    // Indentations of match arms whose block is open.
    let mut match_arms: Vec<usize> = Vec::new();
    // Indentation of the arms of `macro_rules!`, which take no comma.
    let mut macro_arms = None;
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.trim_end();
        let newline = &line[code.len()..];
        let word = code.trim_start();
        let indent = &code[..code.len() - word.len()];
        let first = start + indent.len();
        let is_code = !scan.continues(Line { start, text: code }) && scan.kind(first) != Some(Kind::Comment);
        let ends_in_code = scan.is_code((start + code.len()).saturating_sub(1));
        start += line.len();
        if !is_code || !ends_in_code {
            out.push_str(line);
            continue;
        }
        let closed_an_arm = word.starts_with('}') && match_arms.last() == Some(&indent.len());
        if closed_an_arm {
            match_arms.pop();
        }
        if word == "}" && closed_an_arm {
            out.extend([code, ",", newline]);
            continue;
        }
        if word.starts_with("macro_rules!") {
            macro_arms = Some(indent.len() + 4);
        } else if word.starts_with('}') && macro_arms == Some(indent.len() + 4) {
            macro_arms = None;
        }
        if word.ends_with("=> {") && macro_arms != Some(indent.len()) {
            match_arms.push(indent.len());
        }
        match word.strip_suffix(" {") {
            Some(head) if opens_a_block(head) => {
                // `} else {` becomes three lines: the closing brace gets its own line too.
                let head = match head.strip_prefix("} ") {
                    Some(rest) => {
                        out.extend([indent, "}\n"]);
                        rest
                    }
                    None => head,
                };
                out.extend([indent, head, "\n", indent, "{", newline]);
            }
            _ => out.push_str(line),
        }
    }
    out
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
        let text = r#"
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
        "_" => {
            2
        }
    };
    Point {
        x: z,
    }
}
"#;
        let want = r#"
pub(crate) fn f(x: u32) -> u32
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
        "_" => {
            2
        },
    };
    Point {
        x: z,
    }
}
"#;
        assert_eq!(braces(text), want);
        assert_eq!(braces(want), want);
    }

    #[test]
    fn only_a_block_that_is_an_arm_gets_its_comma() {
        let text =
            "macro_rules! m {\n    () => {\n        x\n    };\n    (y) => {\n        x\n    }\n}\nimpl T\n{\n}\n";
        assert_eq!(braces(text), text);
    }

    #[test]
    fn other_lines_stay_as_they_are() {
        for text in [
            "// if x {\n",
            "/*\nif x {\n*/\n",
            "let s = \"\nif x {\n\";\n",
            "use a::{\n    b,\n};\n",
            "let p = Point {\n",
            "std::mem::take(x)\n",
            "loop\n",
            "struct S;\n",
        ] {
            assert_eq!(braces(text), text);
        }
        assert_eq!(braces(") -> u32 {\n"), ") -> u32\n{\n");
        assert_eq!(braces("    'a: loop {"), "    'a: loop\n    {");
        assert_eq!(
            braces("unsafe impl<T> Send for X<T> {\n"),
            "unsafe impl<T> Send for X<T>\n{\n"
        );
    }
}
