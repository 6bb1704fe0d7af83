//! The rules for what follows a block: `arms` and `ends`. They expect files that rustfmt has formatted,
//! because indentation then shows which lines belong together.

use super::scan::{Kind, Line, Scan, edited, without_visibility};

const ITEMS: &[&str] = &["fn", "struct", "enum", "union", "trait", "impl", "mod"];
const QUALIFIERS: &[&str] = &["default", "const", "async", "unsafe", "extern", "auto"];

/// `}` after a block that is a match arm → `},`. Rustfmt's `match_block_trailing_comma`.
pub fn arms(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    // Indentations of match arms whose block is open.
    let mut open: Vec<usize> = Vec::new();
    // Indentation of the arms of `macro_rules!`, which take no comma.
    let mut macro_arms = None;
    for line in scan.lines() {
        let code = line.text.trim_end();
        let word = code.trim_start();
        let indent = code.len() - word.len();
        let is_code = !scan.continues(line) && scan.kind(line.start + indent) != Some(Kind::Comment);
        if !is_code || !scan.is_code((line.start + code.len()).saturating_sub(1)) {
            continue;
        }
        if word.starts_with('}') && open.last() == Some(&indent) {
            open.pop();
            if word == "}" {
                let end = line.start + code.len();
                edits.push((end..end, ",".to_owned()));
                continue;
            }
        }
        if word.starts_with("macro_rules!") {
            macro_arms = Some(indent + 4);
        } else if word.starts_with('}') && macro_arms == Some(indent + 4) {
            macro_arms = None;
        }
        if word.ends_with("=> {") && macro_arms != Some(indent) {
            open.push(indent);
        }
    }
    edited(text, edits)
}

/// `}` at the end of an item → `} /* fn */`: it says what it closes.
pub fn ends(text: &str) -> String {
    let scan = Scan::new(text);
    let lines = scan.lines().collect::<Vec<_>>();
    let brackets = scan.brackets();
    let mut edits = Vec::new();
    for line in &lines {
        let at = line.start + indentation(line.text);
        if line.text.trim() != "}" || !scan.is_code(at) {
            continue;
        }
        let Some(opened) = brackets.partner[at] else {
            continue;
        };
        let opener = lines.partition_point(|line| line.start <= opened);
        if let Some(item) = item_that_opens(&scan, &lines[..opener], indentation(line.text)) {
            edits.push((at + 1..at + 1, format!(" /* {item} */")));
        }
    }
    edited(text, edits)
}

/// The keyword of the item whose block the last of these lines opens, if it has this indentation.
fn item_that_opens(scan: &Scan<'_>, lines: &[Line<'_>], indent: usize) -> Option<&'static str> {
    let mut heads = lines.iter().rev().filter(|line| indentation(line.text) == indent);
    let head = heads.find(|line| {
        let code = scan.code_of(**line);
        // the end of a head of several lines: look further up
        !(code.is_empty() || code == "{" || code == "where" || code.starts_with([')', '>']))
    })?;
    let code = without_visibility(scan.code_of(*head));
    let mut words = code.split([' ', '<', '(']);
    let word = words.find(|word| !QUALIFIERS.contains(word) && !word.starts_with('"'))?;
    ITEMS.iter().find(|item| **item == word).copied()
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_an_arm_gets_a_comma() {
        let text = "match x {\n    0 => 1,\n    \"_\" => {\n        2\n    }\n}\n";
        let want = "match x {\n    0 => 1,\n    \"_\" => {\n        2\n    },\n}\n";
        assert_eq!(arms(text), want);
        assert_eq!(arms(want), want);
        for text in [
            "macro_rules! m {\n    () => {\n        x\n    };\n    (y) => {\n        x\n    }\n}\nimpl T\n{\n}\n",
            "/*\n=> {\n}\n*/\n",
            "let s = \"\n=> {\n}\n\";\n",
            "let p = Point {\n}\n",
        ] {
            assert_eq!(arms(text), text);
        }
    }

    #[test]
    fn an_item_says_what_its_brace_closes() {
        for (text, want) in [
            ("fn f() {\n    g();\n}\n", "fn f() {\n    g();\n} /* fn */\n"),
            (
                "impl X {\n    pub(crate) async unsafe fn f(\n        x: u8,\n    ) -> u8 {\n        x\n    }\n}\n",
                "impl X {\n    pub(crate) async unsafe fn f(\n        x: u8,\n    ) -> u8 {\n        x\n    } /* fn */\n} /* impl */\n",
            ),
            (
                "unsafe impl<T> X for Y<T>\nwhere\n    T: Z,\n{\n}\n",
                "unsafe impl<T> X for Y<T>\nwhere\n    T: Z,\n{\n} /* impl */\n",
            ),
            ("pub extern \"C\" fn f() {\n}", "pub extern \"C\" fn f() {\n} /* fn */"),
            (
                "mod m {\n    enum E {\n    }\n}\n",
                "mod m {\n    enum E {\n    } /* enum */\n} /* mod */\n",
            ),
        ] {
            assert_eq!(ends(text), want);
            assert_eq!(ends(want), want);
        }
    }

    #[test]
    fn other_braces_stay() {
        for text in [
            "if x {\n}\n",
            "let f = fn_of {\n}\n",
            "fn f() {}\n",
            "fn f() {\n};\n",
            "let s = \"fn f() {\n}\n\";\n",
            "// fn f() {\n// }\n",
            "}\n",
            "x! {\n}\n",
        ] {
            assert_eq!(ends(text), text);
        }
    }
}
